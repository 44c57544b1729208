-- The fenced lock: the functions that all its commands share. `machine/lock.rs` has the argument.
--
-- A lock has two keys that expire together, when its record says. {prefix}:{key} holds the record, the JSON {lockId,
-- expiresAtMs, acquiredAtMs, key, fence}. {prefix}:id:{lock id}, the index, holds the part of the first key that
-- follows "{prefix}:". Our records also have host, pid and label, which no script uses: an extension writes back all
-- fields that it has read. {prefix}:fence:{key} is the fence counter, which never expires.
--
-- Three things come before this in the script: TOLERANCE_MS, which is the same for all stores, LONGEST_RECORD, the length
-- of the longest value of a record or an index that can be ours, and `fast_path.lua`. That
-- defines DIGITS, the number of digits of a fence, and CLUSTER, which says whether the server is a node of a cluster.
-- In a cluster the client itself writes the index, after the lock, and reads it before it calls a script that needs the
-- lock.
--
-- This is the layout of SyncGuard 1. In the layout of SyncGuard 2 the index holds the whole storage key, the counter is
-- {prefix}:fence:{prefix}:{key}, and a fence has 15 digits instead of 19. Clients of the two layouts would exclude each
-- other but count fences separately. So a record or a counter of the other layout is refused.
local PREFIX, NAMESPACE, CLIENT = ARGV[1], ARGV[2], ARGV[3]

-- `lock_of` returns the lock that an index points to; `index_of` returns the value of a lock's index.
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

-- Returns the text in a key, if there is any. If the key has another type, or its value is longer than a record can be,
-- it is not ours, and the second result is an error that names the key. A long value is not read.
local function get(key)
  local text = redis.pcall('GETRANGE', key, 0, LONGEST_RECORD)
  if type(text) == 'string' then
    if text == '' and call('EXISTS', key) == 0 then return nil end
    if #text <= LONGEST_RECORD then return text end
    return nil, redis.error_reply('NOTOURS ' .. key)
  end
  if string.find(text.err, 'WRONGTYPE', 1, true) then text = redis.error_reply('NOTOURS ' .. key) end
  return nil, text
end

-- Returns the lock of a command, given its first key, and the value of its index. If there is no lock, returns nil, and
-- an error if the value of the index is not ours.
local function find(key)
  if CLUSTER then return key end
  local rest, misplaced = get(key)
  if not rest then return nil, misplaced end
  return lock_of(rest), nil, rest
end

local function forget_index(record)
  if not CLUSTER then call('DEL', PREFIX .. 'id:' .. record.lockId) end
end

-- Whether a number can be a time in milliseconds: before the year 5138.
local function is_time(number)
  return type(number) == 'number' and number >= 0 and number < 100000000000000
end

-- Returns the record of a lock, if there is one. If the value is not ours, the second result is an error.
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
