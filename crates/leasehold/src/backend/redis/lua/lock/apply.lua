-- Serves one command after the other, from the first that `straight.lua` has not served. An error of one command leaves
-- the others alone.
--
-- KEYS    of each command, as it says
-- ARGV    1 prefix     what locks begin with
--         2 namespace
--         3 client     the sender's
--         4 layout     "syncguard-1" | "syncguard-2"
--         and for each command
--         1 command    its word
--         and its ARGV
-- Result  for each command what it says, or an error
local function serve()
  local command, first = ARGV[at], at + 1
  -- The client has said that it holds the lock, but it is no common case: then its id decides.
  if command == 'release_held' then command = 'release' end
  -- COMMANDS
end

while at <= last do
  local served, result = pcall(serve)
  if not served and type(result) ~= 'table' then
    -- Older servers say where it happened, and only then what.
    result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
  end
  results[#results + 1] = result
  -- An acquire has four keys and six arguments, an extension one and two, a release of what is held three and one, and
  -- the others have one of each.
  local command = ARGV[at]
  keys = keys + (command == 'acquire' and 4 or command == 'release_held' and 3 or 1)
  at = at + (command == 'acquire' and 7 or command == 'extend' and 3 or 2)
end
return results
