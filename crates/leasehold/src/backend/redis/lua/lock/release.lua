-- Releases a lock by its id, and notifies the clients that wait for it.
--
-- KEYS    1 index of the lock id; of "release_held" also 2 lock, 3 SET of its waiting clients (for `straight.lua` alone)
-- ARGV    1 lock id
-- Also    the lock that the index leads to, the SET of its waiting clients, and their channels
-- Result  1 released | 0 another's | -1 not found | -2 over
local rest, misplaced = get(KEYS[keys + 1])
if not rest then return misplaced or -1 end
local lock = lock_of(rest)
local record, broken = read(lock)
if broken then return broken end
if not record then return -1 end
if not is_live(record) then
  call('DEL', lock, KEYS[keys + 1], PREFIX .. 'id:' .. record.lockId)
  return -2
end
if record.lockId ~= ARGV[first] then return 0 end
call('DEL', lock, KEYS[keys + 1])
local waiting_key = NAMESPACE .. ':lock_waiting:' .. lock
local waiting = redis.pcall('SMEMBERS', waiting_key)
if #waiting > 0 then
  call('DEL', waiting_key)
  for _, client in ipairs(waiting) do
    redis.pcall('PUBLISH', NAMESPACE .. ':wake:' .. client, 'lock ' .. record.key)
  end
end
return 1
