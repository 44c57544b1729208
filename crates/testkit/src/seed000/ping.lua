-- Renews an id, waiting or holding; never moves it in the queue.
-- KEYS: waiting, waiting heartbeat, semaphore
-- ARGV: id, heartbeat, ttl, now
-- Returns {changed_waiting, changed_semaphore}.
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, math.ceil(ARGV[3]) + 10)
end
local alive_by = ARGV[4] + ARGV[2]
return {
  redis.call('ZADD', KEYS[2], 'XX', 'CH', alive_by, ARGV[1]),
  redis.call('ZADD', KEYS[3], 'XX', 'CH', alive_by, ARGV[1]),
}
