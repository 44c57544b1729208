-- Applies one command after the other, starting with the first that `fast_path.lua` has not served. An error of one
-- command does not affect the others.
--
-- KEYS    the KEYS of each command. In a cluster the index of a lock id is in another slot than the lock. So it is left out
--         there, and a command that needs only the index gets the lock instead
-- ARGV    1 prefix     the prefix of the keys of locks
--         2 namespace
--         3 client     the sender
--         4 layout     "syncguard-1" | "syncguard-2"
--         5 channel    the end of the wake-up channels: "", or in a cluster ":" and a hash tag of the slot
--         and for each command
--         1 command    its name
--         and its ARGV
-- Result  the result of each command, or an error
local function serve()
  local command, first = ARGV[at], at + 1
  -- The client believes that it holds the lock, but this is not the common case. So the id decides.
  if command == 'release_held' then command = 'release' end
  -- COMMANDS
end

while at <= last do
  local served, result = pcall(serve)
  if not served and type(result) ~= 'table' then
    -- Older servers put the location before the error.
    result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
  end
  results[#results + 1] = result
  local command = ARGV[at]
  if command == 'acquire' then
    keys, at = beside + 4, at + 7
  elseif command == 'release_held' or command == 'release' and CLUSTER then
    keys, at = beside + 2, at + 2
  else
    keys, at = keys + 1, at + (command == 'extend' and 4 or 2)
  end
  beside = CLUSTER and keys or keys + 1
end
return results
