-- Confirms a slot after a notification, if the id still has it.
-- KEYS: semaphore, ttl, max
-- ARGV: id, limit, heartbeat, ttl, now
-- Returns {changed, card}.
local changed = redis.call('ZADD', KEYS[1], 'XX', 'CH', ARGV[5] + ARGV[3], ARGV[1])
if changed > 0 then
  redis.call('ZADD', KEYS[2], ARGV[5] + ARGV[4], ARGV[1])
  redis.call('EXPIRE', KEYS[2], math.ceil(ARGV[4]) + 10)
end
redis.call('SET', KEYS[3], ARGV[2], 'EX', math.ceil(ARGV[4]) + 10)
return { changed, redis.call('ZCARD', KEYS[1]) }
