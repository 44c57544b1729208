-- Renews a lease.
--
-- ARGV    2 instance id
-- Result  1, "renewed" | 0, "not_held" | 0, "expired" (a member whose holder key has expired); and the counts
if not call('ZSCORE', MEMBERS, ARGV[2]) then return answer(0, 'not_held') end
if call('EXISTS', HOLDER) == 0 then
  expired = expired + call('ZREM', MEMBERS, ARGV[2])
  return answer(0, 'expired')
end
touch(ARGV[2])
return answer(1, 'renewed')
