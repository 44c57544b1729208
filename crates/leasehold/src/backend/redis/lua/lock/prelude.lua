-- The fenced lock: what every script of it shares. `machine/lock.rs` has the argument.
--
-- A lock is two keys that expire together, when its record says: {prefix}:{key} with the JSON {lockId, expiresAtMs,
-- acquiredAtMs, key, fence}, and {prefix}:id:{lock id}, which holds what follows "{prefix}:" in the first. Records of ours
-- also have host, pid and label, of which no script knows: whoever extends a lock writes back all that it has read.
-- {prefix}:fence:{key} counts, and stays.
-- TOLERANCE_MS stands before this: there is one for all stores.
local call = redis.call

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NOW = now()

-- The text in a key, if there is any. A key of another type is not ours: then an error that names it.
local function get(key)
  local text = redis.pcall('GET', key)
  if type(text) ~= 'table' then return text end
  if string.find(text.err, 'WRONGTYPE', 1, true) then text = redis.error_reply('NOTOURS ' .. key) end
  return nil, text
end

-- Whether it can be a time in milliseconds: before the year 5138.
local function is_time(number)
  return type(number) == 'number' and number >= 0 and number < 100000000000000
end

-- The record of a lock, if there is one. If what is there is not ours, an error that says so, and nothing is touched.
local function read(lock)
  local text, broken = get(lock)
  if not text then return nil, broken end
  local parsed, record = pcall(cjson.decode, text)
  if parsed and type(record) == 'table' and type(record.lockId) == 'string' and type(record.key) == 'string'
      and type(record.fence) == 'string' and is_time(record.acquiredAtMs) and is_time(record.expiresAtMs) then
    return record, nil, text
  end
  return nil, redis.error_reply('NOTOURS ' .. lock)
end

local function is_live(record)
  return record.expiresAtMs > NOW - TOLERANCE_MS
end
