-- Answers the periodic query of one waiter, if nothing has changed: nobody has expired, no unit is free, and no other
-- program takes part. In every other case this script changes nothing, and the machine (`machine.lua`, which describes
-- the keys) serves the command.
--
-- KEYS    1 waiting
--         2 main
--         3 ttl
--         4 max
--         5 alive
--         6 info
--         7 limits
--         8 foreign
-- ARGV    1 heartbeat  in microseconds
--         2 id
-- Result  three: the waiters ahead, the delay until the next expiry, the server's time. False if nothing was done
local call, try, KEYS, ARGV = redis.call, redis.pcall, KEYS, ARGV
local waiting, main, alive, info, id = KEYS[1], KEYS[2], KEYS[5], KEYS[6], ARGV[2]
local rank = try('ZRANK', waiting, id)
if type(rank) ~= 'number' or call('EXISTS', KEYS[3], KEYS[7], KEYS[8]) > 0 then return false end
local held, queued = try('ZCARD', main), call('ZCARD', waiting)
local capacity = tonumber(call('MGET', KEYS[4])[1] or nil)
if type(held) ~= 'number' or not capacity or held == 0 or held < capacity then return false end

-- Every member of ours has an info. The info of a member that another program has removed may make up for a member of
-- that program, so the ids are looked at, too.
if try('HLEN', info) ~= held + queued then return false end
local function has_foreign(key, members)
  local function is_foreign(first, last)
    for _, other in ipairs(call('ZRANGE', key, first, last)) do
      if string.sub(other, 12, 12) ~= '-' or not string.find(other, '^%w+%-%d+$') then return true end
    end
  end
  if members <= 100 then return is_foreign(0, -1) end
  return is_foreign(0, 49) or is_foreign(-50, -1)
end
if has_foreign(main, held) or has_foreign(waiting, queued) then return false end

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local function micros(score) return math.min(math.floor(score * 1000000 + 0.5), now + 3155760000000000) end
local function stamp(at) return string.format('%d.%06d', at / 1000000, at % 1000000) end
local expiry = micros(call('ZRANGE', main, 0, 0, 'WITHSCORES')[2])
if expiry <= now or try('ZCOUNT', alive, '-inf', stamp(now)) ~= 0 then return false end

-- The place of a waiter is kept for two leases: `Terms::waiter_lease` says why.
local ends = now + 2 * ARGV[1]
call('ZADD', alive, stamp(ends), id)
local wanted = math.ceil(2 * ARGV[1] / 1000) + 10000
for _, key in ipairs({ waiting, alive, info }) do
  if call('PTTL', key) < wanted - 5000 then call('PEXPIRE', key, wanted) end
end
local head = call('ZSCORE', alive, rank == 0 and id or call('ZRANGE', waiting, 0, 0)[1])
if head then expiry = math.min(expiry, micros(head)) end
return { rank, math.max(expiry - now, 1), now }
