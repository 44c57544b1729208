-- Releases a place.
-- KEYS: pool, holder
-- ARGV: instance id, ttl in seconds
-- Returns {success, status, current count, expired count}.
local pool, holder = KEYS[1], KEYS[2]
local id, ttl = ARGV[1], tonumber(ARGV[2])

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local expired = redis.call('ZREMRANGEBYSCORE', pool, '-inf', now - ttl)

if redis.call('ZREM', pool, id) == 0 then
  return { 0, 'not_held', redis.call('ZCARD', pool), expired }
end
if redis.call('DEL', holder) == 0 then
  return { 0, 'already_expired', redis.call('ZCARD', pool), expired + 1 }
end
return { 1, 'released', redis.call('ZCARD', pool), expired }
