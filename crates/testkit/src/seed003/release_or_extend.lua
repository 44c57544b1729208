-- Releases a lock or, with a TTL, makes it expire that long from now.
-- KEYS: index of the lock id, prefix of the lock's storage key (not a key itself; empty in version 2)
-- ARGV: lock id, tolerance in ms, ttl in ms or nothing
-- Returns 1 for success, 0 if another id holds the lock, -1 if there is none, -2 if it has expired.
local index, prefix = KEYS[1], KEYS[2]
local lock_id, tolerance, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local key = redis.call('GET', index)
if not key then
  return -1
end
local lock = prefix == '' and key or prefix .. ':' .. key
local found = redis.call('GET', lock)
if not found then
  return -1
end

-- The document checks the expiry before the owner. So an expired record is removed, whatever id it has.
local record = cjson.decode(found)
if record.expiresAtMs <= now - tolerance then
  redis.call('DEL', lock, index)
  return -2
end
if record.lockId ~= lock_id then
  return 0
end

if ttl then
  record.expiresAtMs = now + ttl
  redis.call('SET', lock, cjson.encode(record), 'PX', ttl)
  redis.call('SET', index, key, 'PX', ttl)
else
  redis.call('DEL', lock, index)
end
return 1
