-- Whether a lock is held. Only with permission to clean up does asking change anything.
--
-- KEYS    1 lock
-- ARGV    1 milliseconds after its end from when it may be removed ("-": never)
-- Also    the index of a record that is over
-- Result  1 | 0
local record, broken = read(KEYS[keys + 1])
if broken then return broken end
if not record then return 0 end
local after = tonumber(ARGV[first])
if after and record.expiresAtMs + after <= NOW then
  call('DEL', KEYS[keys + 1], PREFIX .. 'id:' .. record.lockId)
end
return is_live(record) and 1 or 0
