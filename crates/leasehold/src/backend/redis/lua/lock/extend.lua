-- Makes a held lock expire one TTL from now, whatever was left of its old TTL; or not before that.
--
-- KEYS    1 index of the lock id; in a cluster the lock
-- ARGV    1 lock id, 2 TTL in milliseconds, 3 1 if the lock must not expire earlier than before, else 0
-- Also    the lock that the index points to
-- Result  1, expires at | 0, 0 held by another id | -1, 0 not found | -2, 0 expired
local verdict, lock, record, rest = owned(KEYS[1], ARGV[7])
if verdict ~= 1 then return { verdict, 0 } end
local expires_at = NOW + tonumber(ARGV[8])
if ARGV[9] == '1' then expires_at = math.max(expires_at, record.expiresAtMs) end
record.expiresAtMs = expires_at
call('SET', lock, cjson.encode(record), 'PXAT', expires_at)
if not CLUSTER then call('SET', KEYS[1], rest, 'PXAT', expires_at) end
return { 1, expires_at }
