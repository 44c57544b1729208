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

-- Ends the command with an error that names the key.
local function refuse(code, key)
  error(redis.error_reply(code .. ' ' .. key))
end

NOW = NOW or now()

-- Returns the text in a key, if there is any. If the key has another type, or its value is longer than a record can be,
-- it is not ours, which is an error. A long value is not read.
local function get(key)
  local text = redis.pcall('GETRANGE', key, 0, LONGEST_RECORD)
  if type(text) == 'table' and not string.find(text.err, 'WRONGTYPE', 1, true) then error(text) end
  if text == '' and call('EXISTS', key) == 0 then return nil end
  if type(text) == 'table' or #text > LONGEST_RECORD then refuse('NOTOURS', key) end
  return text
end

-- Returns the lock of a command, given its first key, and the value of its index. Returns nothing if there is no index.
local function find(key)
  if CLUSTER then return key end
  local rest = get(key)
  if rest then return lock_of(rest), rest end
end

local function forget_index(record)
  if not CLUSTER then call('DEL', PREFIX .. 'id:' .. record.lockId) end
end

-- Whether a number can be a time in milliseconds: before the year 5138.
local function is_time(number)
  return type(number) == 'number' and number >= 0 and number < 100000000000000
end

-- Returns the record of a lock, and its text, if there is one. A value that is not ours is an error.
local function read(lock)
  local text = get(lock)
  if not text then return end
  local parsed, record = pcall(cjson.decode, text)
  if parsed and type(record) == 'table' and type(record.lockId) == 'string' and type(record.key) == 'string'
      and type(record.fence) == 'string' and is_time(record.acquiredAtMs) and is_time(record.expiresAtMs) then
    if #record.fence ~= DIGITS then refuse('OTHERLAYOUT', lock) end
    return record, text
  end
  refuse('NOTOURS', lock)
end

local function is_live(record)
  return record.expiresAtMs > NOW - TOLERANCE_MS
end

-- Returns whether this id holds the lock of a command, given the first key of the command: 1, and the lock, its record
-- and the value of its index | 0 held by another id | -1 not found | -2 expired.
local function owned(first_key, id)
  local lock, rest = find(first_key)
  local record = lock and read(lock)
  if not record then return -1 end
  if not is_live(record) then
    call('DEL', lock, first_key)
    forget_index(record)
    return -2
  end
  if record.lockId ~= id then return 0 end
  return 1, lock, record, rest
end
