-- What is known of a lock that is held, by its key or by its id.
--
-- KEYS    1 the lock, or the index of the lock id
-- ARGV    1 lock id ("-": by key), 2 what locks begin with
-- Also    the lock that the index leads to
-- Result  the JSON of the record, or nothing
local lock = KEYS[1]
if ARGV[1] ~= '-' then
  local rest, misplaced = get(KEYS[1])
  if not rest then return misplaced or false end
  lock = ARGV[2] .. rest
end
local record, broken, text = read(lock)
if broken then return broken end
if not record or not is_live(record) then return false end
if ARGV[1] ~= '-' and record.lockId ~= ARGV[1] then return false end
return text
