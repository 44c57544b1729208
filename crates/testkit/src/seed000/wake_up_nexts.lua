-- Grants free slots from the head of the queue and notifies the granted waiters.
-- KEYS: semaphore, ttl, waiting, waiting heartbeat
-- ARGV: limit, heartbeat, ttl, now, notification key with a placeholder for the id
-- Returns how many were notified.
local semaphore, ttls, waiting, alive = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now, expiry = ARGV[4], math.ceil(ARGV[3]) + 10

for _, id in ipairs(redis.call('ZRANGEBYSCORE', ttls, '-inf', now)) do
  redis.call('ZREM', semaphore, id)
  redis.call('ZREM', ttls, id)
end
redis.call('ZREMRANGEBYSCORE', semaphore, '-inf', now)

-- Dead waiters stay in the queue while there is no free slot.
local available = ARGV[1] - redis.call('ZCARD', semaphore)
if available <= 0 then
  return 0
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now)) do
  redis.call('ZREM', waiting, id)
  redis.call('ZREM', alive, id)
end

local notified = 0
while notified < available do
  local id = redis.call('ZPOPMIN', waiting)[1]
  if not id then
    break
  end
  redis.call('ZREM', alive, id)
  redis.call('ZADD', semaphore, now + ARGV[2], id)
  redis.call('EXPIRE', semaphore, expiry)
  local list = string.gsub(ARGV[5], '@@@ACQUISITION_ID@@@', id)
  redis.call('RPUSH', list, '1')
  redis.call('EXPIRE', list, math.ceil(ARGV[2]) + 10)
  notified = notified + 1
end
return notified
