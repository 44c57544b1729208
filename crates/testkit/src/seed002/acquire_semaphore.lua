-- Acquires a place, if one is free or the instance has one already.
-- KEYS: pool, holder
-- ARGV: instance id, capacity, ttl in seconds
-- Returns {success, status, current count, expired count}.
local pool, holder = KEYS[1], KEYS[2]
local id, capacity, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local expired = redis.call('ZREMRANGEBYSCORE', pool, '-inf', now - ttl)

local held = redis.call('ZSCORE', pool, id)
if not held and redis.call('ZCARD', pool) >= capacity then
  return { 0, 'capacity_full', redis.call('ZCARD', pool), expired }
end
redis.call('ZADD', pool, now, id)
redis.call('SET', holder, '1', 'EX', ttl)
return { 1, 'acquired', redis.call('ZCARD', pool), expired }
