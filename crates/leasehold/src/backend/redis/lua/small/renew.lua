-- Renews holders of ordinary permits, if the name has no limits but its capacity, nothing has expired, no unit is free that
-- somebody waits for, and no other program has left or removed a member. In every other case this script changes nothing, and the machine (`machine.lua`, which describes the keys) serves the command.
--
-- KEYS    1 main
--         2 info
--         3 waiting
--         4 max
--         5 ttl
--         6 alive
--         7 limits
-- ARGV    1 heartbeat  in microseconds
--         2 ids        from here on
-- Result  two for each id: its fence, valid_for. False if nothing was done
local call, try, KEYS, ARGV = redis.call, redis.pcall, KEYS, ARGV
local main, info, ttls = KEYS[1], KEYS[2], KEYS[5]
local first = try('ZRANGE', main, 0, 0, 'WITHSCORES')[2]
if not first then return false end
local others = call('EXISTS', KEYS[3], ttls)
local limited = others > 0 and try('ZCARD', ttls) or 0
if type(limited) ~= 'number' then return false end
local is_queue = others > math.min(limited, 1)
local held, queued = call('ZCARD', main), is_queue and try('ZCARD', KEYS[3]) or 0
if type(queued) ~= 'number' or limited > held or try('HLEN', info) ~= held + queued then return false end
local texts = call('MGET', KEYS[4], KEYS[7])
local capacity = tonumber(texts[1] or nil)
if texts[2] or not capacity or is_queue and held < capacity then return false end

local time = call('TIME')
local now, heartbeat = time[1] * 1000000 + time[2], tonumber(ARGV[1])
local function micros(score) return math.min(math.floor(score * 1000000 + 0.5), now + 3155760000000000) end
if micros(first) <= now then return false end
if is_queue then
  local dead = try('ZCOUNT', KEYS[6], '-inf', string.format('%d.%06d', now / 1000000, now % 1000000))
  if dead ~= 0 then return false end
end
if limited > 0 and micros(call('ZRANGE', ttls, 0, 0, 'WITHSCORES')[2]) <= now then return false end

local new = #ARGV - 1
local scores = call('ZMSCORE', main, unpack(ARGV, 2))
texts = try('HMGET', info, unpack(ARGV, 2))
local ends = limited > 0 and call('ZMSCORE', ttls, unpack(ARGV, 2)) or {}
local at = now + heartbeat
local renew_by = string.format('%d.%06d', at / 1000000, at % 1000000)
local members, result = {}, {}
for i = 1, new do
  local fence, ttl = string.match(texts[i] or '', '^(%d+) %d+ %d+ (%S+)')
  if not scores[i] or not fence or (ttl ~= '-') ~= not not ends[i] then return false end
  members[2 * i - 1], members[2 * i] = renew_by, ARGV[i + 1]
  result[2 * i - 1], result[2 * i] = tonumber(fence), heartbeat
  if ends[i] then result[2 * i] = math.min(heartbeat, micros(ends[i]) - now) end
end
call('ZADD', main, unpack(members))
-- Another program may let the capacity expire.
call('PERSIST', KEYS[4])
-- The expiry of a key only grows. To save calls, it is set only if it is more than five seconds short.
local wanted = math.ceil(heartbeat / 1000) + 10000
if call('PTTL', main) < wanted - 5000 then call('PEXPIRE', main, wanted) end
if call('PTTL', info) < wanted - 5000 then call('PEXPIRE', info, wanted) end
if limited > 0 then
  local last = micros(call('ZRANGE', ttls, -1, -1, 'WITHSCORES')[2])
  wanted = math.ceil((last - now) / 1000) + 10000
  if call('PTTL', ttls) < wanted - 5000 then call('PEXPIRE', ttls, wanted) end
end
return result
