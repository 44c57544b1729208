-- Ends a lock by its id, and tells whoever waits for it.
--
-- KEYS    1 the index of the lock id
-- ARGV    2 lock id, 3 what locks begin with, 4 what the SETs of waiting clients begin with, 5 what channels begin with
-- Also    the lock that the index leads to, the SET of its waiting clients, and their channels
-- Result  1 released | 0 another's | -1 not found | -2 over
local rest, misplaced = get(KEYS[1])
if not rest then return misplaced or -1 end
local lock = ARGV[3] .. rest
local record, broken = read(lock)
if broken then return broken end
if not record then return -1 end
if not is_live(record) then
  call('DEL', lock, KEYS[1], ARGV[3] .. 'id:' .. record.lockId)
  return -2
end
if record.lockId ~= ARGV[2] then return 0 end
call('DEL', lock, KEYS[1])
local waiting = redis.pcall('SMEMBERS', ARGV[4] .. lock)
if #waiting > 0 then
  call('DEL', ARGV[4] .. lock)
  for _, client in ipairs(waiting) do redis.pcall('PUBLISH', ARGV[5] .. client, 'lock ' .. record.key) end
end
return 1
