-- Returns the record of a lock that is held, by its key or by its id.
--
-- KEYS    1 lock, or index of the lock id; in a cluster always the lock
-- ARGV    1 lock id ("-": by key)
-- Also    the lock that the index points to
-- Result  the JSON of the record, or nothing
local lock = KEYS[keys + 1]
if ARGV[first] ~= '-' then
  local found, misplaced = find(lock)
  if not found then return misplaced or false end
  lock = found
end
local record, broken, text = read(lock)
if broken then return broken end
if not record or not is_live(record) then return false end
if ARGV[first] ~= '-' and record.lockId ~= ARGV[first] then return false end
return text
