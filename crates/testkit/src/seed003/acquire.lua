-- Acquires a lock that is free or expired, with the next fence.
-- KEYS: lock, index of the lock id, fence counter
-- ARGV: lock id, ttl in ms, tolerance in ms, key, digits of a fence, what the index holds
-- Returns 0 if it is held, else {1, fence, fence as a number, expiry in ms}.
local lock, index, counter = KEYS[1], KEYS[2], KEYS[3]
local lock_id, ttl, tolerance, key = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local found = redis.call('GET', lock)
if found then
  local record = cjson.decode(found)
  if record.expiresAtMs > now - tolerance then
    return 0
  end
  if record.lockId then
    redis.call('DEL', index)
  end
end

local number = redis.call('INCR', counter)
local fence = string.format('%0' .. ARGV[5] .. 'd', number)
local expires_at = now + ttl
local record = cjson.encode({
  lockId = lock_id,
  expiresAtMs = expires_at,
  acquiredAtMs = now,
  key = key,
  fence = fence,
})
redis.call('SET', lock, record, 'PX', ttl)
redis.call('SET', index, ARGV[6], 'PX', ttl)
return { 1, fence, number, expires_at }
