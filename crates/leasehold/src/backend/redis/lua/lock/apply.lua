-- Serves one command after the other. An error of one command leaves the others alone.
--
-- KEYS    of each command, as it says
-- ARGV    1 prefix     what locks begin with
--         2 namespace
--         3 client     the sender's
--         4 layout     "syncguard-1" | "syncguard-2"
--         and for each command
--         1 command    its word
--         2 keys       the number of its KEYS
--         3 arguments  the number of its ARGV
--         and its ARGV
-- Result  for each command what it says, or an error
local at, keys = 5, 0

local function serve()
  local command, first = ARGV[at], at + 3
  -- COMMANDS
end

local results = {}
while at <= #ARGV do
  local served, result = pcall(serve)
  if not served and type(result) ~= 'table' then
    -- Older servers say where it happened, and only then what.
    result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
  end
  results[#results + 1] = result
  keys = keys + ARGV[at + 1]
  at = at + 3 + ARGV[at + 2]
end
return results
