-- Renews a place for another TTL.
-- KEYS: pool, holder
-- ARGV: instance id, ttl in seconds
-- Returns {success, status, current count, expired count}.
local pool, holder = KEYS[1], KEYS[2]
local id, ttl = ARGV[1], tonumber(ARGV[2])

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local expired = redis.call('ZREMRANGEBYSCORE', pool, '-inf', now - ttl)

if not redis.call('ZSCORE', pool, id) then
  return { 0, 'not_held', redis.call('ZCARD', pool), expired }
end
if redis.call('EXISTS', holder) == 0 then
  redis.call('ZREM', pool, id)
  return { 0, 'expired', redis.call('ZCARD', pool), expired + 1 }
end
redis.call('ZADD', pool, now, id)
redis.call('SET', holder, '1', 'EX', ttl)
return { 1, 'renewed', redis.call('ZCARD', pool), expired }
