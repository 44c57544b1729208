-- Finds the lock that a lock id holds.
-- KEYS: index of the lock id, prefix of the lock's storage key (not a key itself; empty in version 2)
-- ARGV: lock id, tolerance in ms
-- Returns the record, or nothing if there is none, another id holds the lock or it has expired.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local key = redis.call('GET', KEYS[1])
local found = key and redis.call('GET', KEYS[2] == '' and key or KEYS[2] .. ':' .. key)
if not found then
  return nil
end
local record = cjson.decode(found)
if record.lockId ~= ARGV[1] or record.expiresAtMs <= now - tonumber(ARGV[2]) then
  return nil
end
return found
