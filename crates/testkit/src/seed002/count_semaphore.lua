-- Counts the places that are taken.
-- KEYS: pool
-- ARGV: ttl in seconds
-- Returns {current count, expired count}.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local expired = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1])
return { redis.call('ZCARD', KEYS[1]), expired }
