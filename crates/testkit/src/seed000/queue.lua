-- Joins both waiting queues: one keeps the order, the other the heartbeats.
-- KEYS: waiting, waiting heartbeat
-- ARGV: id, heartbeat, ttl, now
redis.call('ZADD', KEYS[1], ARGV[4], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[4] + ARGV[2], ARGV[1])
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, math.ceil(ARGV[3]) + 10)
end
return 1
