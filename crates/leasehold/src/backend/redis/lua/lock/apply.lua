-- Applies a command that `fast_path.lua` has not served.
--
-- KEYS    the KEYS of the command. In a cluster the index of a lock id is in another slot than the lock. So it is left out
--         there, and a command that needs only the index gets the lock instead
-- ARGV    1 prefix     the prefix of the keys of locks
--         2 namespace
--         3 client     the sender
--         4 layout     "syncguard-1" | "syncguard-2"
--         5 channel    the end of the wake-up channels: "", or in a cluster ":" and a hash tag of the slot
--         6 command    its name
--         and from 7 on its ARGV
-- Result  the result of the command
local function serve()
  -- COMMANDS
end

local served, result = pcall(serve)
if not served and type(result) ~= 'table' then
  -- Older servers put the location before the error.
  result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
end
return result
