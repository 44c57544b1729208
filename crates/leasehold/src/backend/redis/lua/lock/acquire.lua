-- Takes a lock that is free.
--
-- KEYS    1 the lock, 2 the index of the lock id, 3 the fence counter, 4 SET of the clients that wait for it
-- ARGV    1 lock id, 2 TTL in milliseconds, 3 the key as JSON, 4 what locks begin with, 5 "if_locked" | "always" (tell the
--         client of the next release) | "never", 6 client id
-- Also    the index of a record that is over
-- Result  1, fence, expires at, remaining | 0, 0, 0, remaining of the holder
local record, broken = read(KEYS[1])
if broken then return broken end

-- Should somebody else have put something there, whoever waits is not told, and asks again by himself.
local function want(millis)
  if type(redis.pcall('SADD', KEYS[4], ARGV[6])) == 'table' then return end
  -- Whoever still waits when the lease ends asks again then.
  call('PEXPIRE', KEYS[4], millis + 10000)
end

if record and is_live(record) then
  local remaining = math.max(record.expiresAtMs - NOW, 0)
  -- Asked again with the same id, because the answer was lost: the same lock.
  if record.lockId == ARGV[1] then
    if ARGV[5] == 'always' then want(remaining) end
    return { 1, record.fence, record.expiresAtMs, remaining }
  end
  if ARGV[5] ~= 'never' then want(remaining) end
  return { 0, 0, 0, remaining }
end

-- The counter is the first to be written, and may not be one.
local counted = redis.pcall('INCR', KEYS[3])
if type(counted) == 'table' then
  for _, words in ipairs({ 'WRONGTYPE', 'not an integer', 'overflow' }) do
    if string.find(counted.err, words, 1, true) then return redis.error_reply('BADFENCE ' .. KEYS[3]) end
  end
  return counted
end
if counted < 1 then
  call('DECR', KEYS[3])
  return redis.error_reply('BADFENCE ' .. KEYS[3])
end
-- A Lua number is not exact from 2^53 on: then it is read as text.
local digits = counted < 9007199254740992 and string.format('%d', counted) or call('GET', KEYS[3])
local fence = string.rep('0', 19 - #digits) .. digits
local ttl = tonumber(ARGV[2])
local ends = NOW + ttl
if record then call('DEL', ARGV[4] .. 'id:' .. record.lockId) end
-- `cjson.encode` would do, for twice the time.
call('SET', KEYS[1], '{"lockId":"' .. ARGV[1] .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. NOW
  .. ',"key":' .. ARGV[3] .. ',"fence":"' .. fence .. '"}', 'PXAT', ends)
call('SET', KEYS[2], string.sub(KEYS[1], #ARGV[4] + 1), 'PXAT', ends)
if ARGV[5] == 'always' then want(ttl) end
return { 1, fence, ends, ttl }
