-- Acquires a lock that is free.
--
-- KEYS    1 lock, 2 index of the lock id, 3 fence counter, 4 SET of the clients that wait for the lock
-- ARGV    1 lock id, 2 TTL in milliseconds, 3 key as JSON, 4 notify: "if_locked" | "always" (the client, of the next
--         release) | "never", 5 holder: further members of the record as JSON, each after a comma, 6 fence that the
--         client expects, with all its digits, or "-" if it expects that the lock is held (for `straight.lua` alone)
-- Also    the index of a record that is over, and the fence counter of the other layout
-- Result  1, fence, expires at, remaining | 0, 0, 0, remaining of the holder
local lock, waiting = KEYS[keys + 1], KEYS[keys + 4]
local id, notify = ARGV[first], ARGV[first + 3]
local record, broken = read(lock)
if broken then return broken end
local held = record and is_live(record)
local remaining = held and math.max(record.expiresAtMs - NOW, 0) or tonumber(ARGV[first + 1])
local own = held and record.lockId == id
if notify == 'always' or notify == 'if_locked' and held and not own then
  -- Should another program have put something there, the waiter is not notified, and asks again by itself. Whoever still
  -- waits when the lease ends asks again then.
  if type(redis.pcall('SADD', waiting, CLIENT)) ~= 'table' then call('PEXPIRE', waiting, remaining + 10000) end
end
-- Asked again with the same id, because the answer was lost: the same lock.
if own then return { 1, record.fence, record.expiresAtMs, remaining } end
if held then return { 0, 0, 0, remaining } end

-- The counter is the first to be written, and may not be one.
local counted = redis.pcall('INCR', KEYS[keys + 3])
if type(counted) == 'table' then
  for _, words in ipairs({ 'WRONGTYPE', 'not an integer', 'overflow' }) do
    if string.find(counted.err, words, 1, true) then return redis.error_reply('BADFENCE ' .. KEYS[keys + 3]) end
  end
  return counted
end
if counted < 1 then
  call('DECR', KEYS[keys + 3])
  return redis.error_reply('BADFENCE ' .. KEYS[keys + 3])
end
-- Nobody has counted here before. If somebody has counted in the other layout, two would count apart.
if counted == 1 then
  local rest = string.sub(lock, #PREFIX + 1)
  local other = PREFIX .. 'fence:' .. (IS_LAYOUT_2 and rest or lock)
  if call('EXISTS', other) == 1 then
    call('DEL', KEYS[keys + 3])
    return other_layout(other)
  end
end
-- A Lua number is not exact from 2^53 on: then it is read as text.
local digits = counted < 9007199254740992 and string.format('%d', counted) or call('GET', KEYS[keys + 3])
local fence = string.rep('0', DIGITS - #digits) .. digits
local ends = NOW + remaining
if record then call('DEL', PREFIX .. 'id:' .. record.lockId) end
-- `cjson.encode` would do, for twice the time.
call('SET', lock, '{"lockId":"' .. id .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. NOW
  .. ',"key":' .. ARGV[first + 2] .. ',"fence":"' .. fence .. '"' .. ARGV[first + 4] .. '}', 'PXAT', ends)
call('SET', KEYS[keys + 2], index_of(lock), 'PXAT', ends)
return { 1, fence, ends, remaining }
