-- Gives a lock back or, with a TTL, lets it end so long from now.
-- KEYS: index of the lock id, prefix (no key itself: the lock's is made from it; empty in version 2)
-- ARGV: lock id, tolerance in ms, ttl in ms or nothing
-- Returns 1 if done, 0 if the lock is another's, -1 if there is none, -2 if it has expired.
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

-- In the document's order, so an expired record goes whoever's it is.
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
