-- Whether somebody has a lock. Only if it may clean up does asking change anything.
--
-- KEYS    1 the lock
-- ARGV    1 milliseconds after its end from when it may be removed ("-": never), 2 what indexes begin with
-- Also    the index of a record that is over
-- Result  1 | 0
local record, broken = read(KEYS[1])
if broken then return broken end
if not record then return 0 end
local after = tonumber(ARGV[1])
if after and record.expiresAtMs + after <= NOW then call('DEL', KEYS[1], ARGV[2] .. record.lockId) end
return is_live(record) and 1 or 0
