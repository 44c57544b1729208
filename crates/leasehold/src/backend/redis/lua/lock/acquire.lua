-- Acquires a lock if it is free.
--
-- KEYS    1 index of the lock id, 2 lock, 3 fence counter, 4 SET of the clients that wait for the lock, 5 fence counter of
--         the other layout
-- ARGV    1 lock id, 2 TTL in milliseconds, 3 key as JSON, 4 notify: whether the client wants to be notified of the next
--         release: "if_locked" | "always" | "never", 5 holder: further members of the record as JSON, each after a comma,
--         6 fence that the client expects, with all its digits, or "-" if it expects that the lock is held (only for
--         `fast_path.lua`)
-- Also    the index of an expired record
-- Result  1, fence, expires at, remaining | 0, 0, 0, remaining of the holder
local lock, counter, waiting, other = unpack(KEYS, beside + 1, beside + 4)
local id, notify = ARGV[7], ARGV[10]
local record = read(lock)
local held = record and is_live(record)
local remaining = held and math.max(record.expiresAtMs - NOW, 0) or tonumber(ARGV[8])
local is_repeated = held and record.lockId == id
if notify == 'always' or notify == 'if_locked' and held and not is_repeated then
  -- If another program has stored another type in this key, the client is not notified, and asks again by itself. A
  -- client that still waits when the lease ends asks again then.
  if type(redis.pcall('SADD', waiting, CLIENT)) ~= 'table' then call('PEXPIRE', waiting, remaining + 10000) end
end
-- The same id asks again, because the answer was lost. It holds the same lock.
if is_repeated then return { 1, record.fence, record.expiresAtMs, remaining } end
if held then return { 0, 0, 0, remaining } end

-- The counter is incremented before the record is written, because its value may not be a number.
local counted = redis.pcall('INCR', counter)
if type(counted) == 'table' then
  for _, words in ipairs({ 'WRONGTYPE', 'not an integer', 'overflow' }) do
    if string.find(counted.err, words, 1, true) then refuse('BADFENCE', counter) end
  end
  return counted
end
-- This counter is new. If the other layout has one, the two layouts would count separately.
if counted == 1 and call('EXISTS', other) == 1 then
  call('DEL', counter)
  refuse('OTHERLAYOUT', other)
end
-- From 2^53 on, Lua numbers are not exact, so the counter is read as text.
local digits = counted < 9007199254740992 and string.format('%d', counted) or call('GET', counter)
-- A fence is positive. With more digits than its layout it would not be the largest as text.
if counted < 1 or #digits > DIGITS then
  call('DECR', counter)
  refuse('BADFENCE', counter)
end
local fence = string.rep('0', DIGITS - #digits) .. digits
local ends = NOW + remaining
if record then forget_index(record) end
-- `cjson.encode` would take twice the time.
call('SET', lock, '{"lockId":"' .. id .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. NOW
  .. ',"key":' .. ARGV[9] .. ',"fence":"' .. fence .. '"' .. ARGV[11] .. '}', 'PXAT', ends)
if not CLUSTER then call('SET', KEYS[1], index_of(lock), 'PXAT', ends) end
return { 1, fence, ends, remaining }
