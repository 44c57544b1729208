-- Returns whether a lock is held. It removes an expired record only if it may clean up.
--
-- KEYS    1 lock
-- ARGV    1 how many milliseconds after its expiry a record may be removed ("-": never)
-- Also    the index of an expired record
-- Result  1 | 0
local record = read(KEYS[1])
if not record then return 0 end
local after = tonumber(ARGV[7])
if after and record.expiresAtMs + after <= NOW then
  call('DEL', KEYS[1])
  forget_index(record)
end
return is_live(record) and 1 or 0
