-- Serves one name after the other.
--
-- ARGV    for each name
--         1 name
--         2 capacity    what the sender declared last; 0 if it never did
--         3 arguments   how many follow that are about this name
--         and, for each transition of it
--         4 transition  its word
--         5 arguments   how many follow
--         and what the transition says
local at, keys = 5, 0

-- Every command runs as expire, grant, the command, grant. What one command leaves behind is where the next begins, so
-- that the first two are done once a name.
local function serve()
  NAME, DECLARED = ARGV[at], ARGV[at + 1]
  MAIN, TTL, MAX, WAITING, ALIVE, FENCE, INFO = unpack(KEYS, keys + 1, keys + 7)
  capacity, last_fence, place = nil, nil, nil
  main, ttls, infos, max, waiting, alive = {}, {}, {}, nil, nil, nil
  outcomes, granted, holding = {}, {}, {}
  held, limited, queued = call('ZCARD', MAIN), call('ZCARD', TTL), call('ZCARD', WAITING)
  alone = held == 0 and queued == 0
  held_before, longest = held, 0
  local section, done = at + 3, at + 3 + ARGV[at + 2]
  -- First of all: if that makes room, it belongs to those who were here before.
  if ARGV[section] == 'enqueue' then declare(ARGV[section + 2]) end
  -- Who only asks comes by again and again, and so looks whether another program has left something behind.
  local asks = ARGV[section] == 'renew' or ARGV[section] == 'sweep'
  if limited > held or asks and call('HLEN', INFO) > held + queued then forget_the_gone() end
  expire()
  grant()
  while section < done do
    local transition, first = ARGV[section], section + 2
    local last = section + 1 + ARGV[section + 1]
    section = last + 1
    -- TRANSITIONS
  end
  return finish()
end

local results = {}
while at <= #ARGV do
  local served, result = pcall(serve)
  if not served then
    -- Whoever was granted a permit on the way, or enqueued, is not forgotten.
    if #main > 0 or waiting then pcall(flush) end
    if type(result) ~= 'table' then
      -- Older servers say where it happened, and only then what.
      result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
    end
  end
  results[#results + 1] = result
  at, keys = at + 3 + ARGV[at + 2], keys + 7
end
return results
