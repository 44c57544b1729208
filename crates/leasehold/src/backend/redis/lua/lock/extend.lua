-- Lets a lock that is held end so long from now, whatever was left of its TTL.
--
-- KEYS    1 index of the lock id
-- ARGV    1 lock id, 2 TTL in milliseconds
-- Also    the lock that the index leads to
-- Result  1, expires at | 0, 0 another's | -1, 0 not found | -2, 0 over
local rest, misplaced = get(KEYS[keys + 1])
if not rest then return misplaced or { -1, 0 } end
local lock = lock_of(rest)
local record, broken = read(lock)
if broken then return broken end
if not record then return { -1, 0 } end
if not is_live(record) then
  call('DEL', lock, KEYS[keys + 1], PREFIX .. 'id:' .. record.lockId)
  return { -2, 0 }
end
if record.lockId ~= ARGV[first] then return { 0, 0 } end
record.expiresAtMs = NOW + tonumber(ARGV[first + 1])
call('SET', lock, cjson.encode(record), 'PXAT', record.expiresAtMs)
call('SET', KEYS[keys + 1], rest, 'PXAT', record.expiresAtMs)
return { 1, record.expiresAtMs }
