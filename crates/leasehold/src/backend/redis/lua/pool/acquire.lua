-- Acquires a lease if the pool is not full. An instance that already has a lease renews it.
--
-- ARGV    2 instance id, 3 capacity
-- Result  1, "acquired" | 0, "capacity_full"; and the counts
if not call('ZSCORE', MEMBERS, ARGV[2]) and call('ZCARD', MEMBERS) >= tonumber(ARGV[3]) then
  return answer(0, 'capacity_full')
end
touch(ARGV[2])
return answer(1, 'acquired')
