-- Removes an id, whether it waits or holds.
-- KEYS: semaphore, ttl, waiting, waiting heartbeat
-- ARGV: id
-- Returns the number of members removed from the semaphore.
local removed = redis.call('ZREM', KEYS[1], ARGV[1])
for index = 2, 4 do
  redis.call('ZREM', KEYS[index], ARGV[1])
end
return removed
