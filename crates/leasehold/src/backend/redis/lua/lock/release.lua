-- Releases a lock by its id, and notifies the clients that wait for it.
--
-- KEYS    1 index of the lock id; of "release_held", and in a cluster, also 2 lock, 3 SET of its waiting clients
-- ARGV    1 lock id
-- Also    the lock that the index points to, the SET of its waiting clients, and their channels
-- Result  1 released | 0 held by another id | -1 not found | -2 expired
local verdict, lock, record = owned(KEYS[1], ARGV[7])
if verdict ~= 1 then return verdict end
call('DEL', lock, KEYS[1])
local waiting_key = NAMESPACE .. ':lock_waiting:' .. lock
local waiting = redis.pcall('SMEMBERS', waiting_key)
if #waiting > 0 then
  call('DEL', waiting_key)
  for _, client in ipairs(waiting) do
    local publish = CLUSTER and 'SPUBLISH' or 'PUBLISH'
    redis.pcall(publish, NAMESPACE .. ':wake:' .. client .. ARGV[5], 'lock ' .. record.key)
  end
end
return 1
