-- Releases a lease.
--
-- ARGV    2 instance id
-- Result  1, "released" | 0, "not_held" | 0, "already_expired" (a member whose holder key has expired); and the counts
if call('ZREM', MEMBERS, ARGV[2]) == 0 then return answer(0, 'not_held') end
if call('DEL', HOLDER) == 0 then
  expired = expired + 1
  return answer(0, 'already_expired')
end
return answer(1, 'released')
