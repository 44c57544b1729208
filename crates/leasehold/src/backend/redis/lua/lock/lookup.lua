-- Returns the record of a lock that is held, by its key or by its id.
--
-- KEYS    1 lock, or index of the lock id; in a cluster always the lock
-- ARGV    1 lock id ("-": by key)
-- Also    the lock that the index points to
-- Result  the JSON of the record, or nothing
local id, lock = ARGV[7], KEYS[1]
if id ~= '-' then lock = find(lock) end
if not lock then return false end
local record, text = read(lock)
return record and is_live(record) and (id == '-' or record.lockId == id) and text or false
