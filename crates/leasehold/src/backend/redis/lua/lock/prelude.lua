-- The fenced lock: what every script of it shares. `machine/lock.rs` has the argument.
--
-- A lock is two keys that expire together, when its record says: {prefix}:{key} with the JSON {lockId, expiresAtMs,
-- acquiredAtMs, key, fence}, and {prefix}:id:{lock id}, which holds what follows "{prefix}:" in the first. Records of ours
-- also have host, pid and label, of which no script knows: whoever extends a lock writes back all that it has read.
-- {prefix}:fence:{key} counts, and stays.
-- TOLERANCE_MS stands before this: there is one for all stores. So does `straight.lua`.
--
-- That is the layout of SyncGuard 1. In that of SyncGuard 2 the index holds the whole storage key, the counter is
-- {prefix}:fence:{prefix}:{key}, and a fence has 15 digits instead of 19. Whoever mixed the two would exclude each other and
-- count apart, so a record or a counter of the other layout is refused.
local PREFIX, NAMESPACE, CLIENT = ARGV[1], ARGV[2], ARGV[3]
local DIGITS = IS_LAYOUT_2 and 15 or 19

-- Where an index leads, and what it holds.
local function lock_of(index)
  return IS_LAYOUT_2 and index or PREFIX .. index
end

local function index_of(lock)
  return IS_LAYOUT_2 and lock or string.sub(lock, #PREFIX + 1)
end

local function other_layout(key)
  return redis.error_reply('OTHERLAYOUT ' .. key)
end

NOW = NOW or now()

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
    if #record.fence ~= DIGITS then return nil, other_layout(lock) end
    return record, nil, text
  end
  return nil, redis.error_reply('NOTOURS ' .. lock)
end

local function is_live(record)
  return record.expiresAtMs > NOW - TOLERANCE_MS
end
