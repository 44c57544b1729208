-- Removes ids, whether they hold or wait. Repeating it is harmless.
--
-- ARGV    1 known  what is known about all of them: "held": they held ordinary permits; "limited": the same, with a TTL;
--                  "unknown": nothing; "unused": nothing, but no caller has seen a permit, so tokens are returned
--         2 ids    from here on
-- Result  one for each id: "holder" | "waiter" | "nobody"
local was_held, waited, n = ARGV[first] == 'held' or ARGV[first] == 'limited', queued > 0, #outcomes
-- One of these ids may have been granted a permit earlier in this call.
if is_gathered() then flush() end
local texts, unused = not was_held and call('HMGET', INFO, unpack(ARGV, first + 1, last)) or {}, {}
-- First the hash: it is the only key whose type may not have been checked yet.
call('HDEL', INFO, unpack(ARGV, first + 1, last))
for at = first + 1, last do
  n = n + 1
  -- One by one, because reading the scores of all ids first costs more.
  if call('ZREM', MAIN, ARGV[at]) == 1 then
    outcomes[n] = 'holder'
    held, holding[ARGV[at]], news = held - 1, nil, true
    local fence = end_released(ARGV[at], texts[at - first])
    if ARGV[first] == 'unused' then unused[#unused + 1] = fence end
  -- An id that held does not wait again.
  elseif not was_held and waited and call('ZREM', WAITING, ARGV[at]) == 1 then
    outcomes[n] = 'waiter'
    queued, news = queued - 1, true
    mark_cancelled(ARGV[at], texts[at - first])
  else
    outcomes[n] = 'nobody'
  end
end
return_tokens(unused)
if limited > 0 then limited = limited - call('ZREM', TTL, unpack(ARGV, first + 1, last)) end
if not was_held then
  if waited then call('ZREM', ALIVE, unpack(ARGV, first + 1, last)) end
  -- Only an id that another program has granted a permit can have a list: see `renew_holder`.
  local lists = {}
  for at = first + 1, last do lists[at - first] = ARGV[1] .. ':acquisition_notification:' .. ARGV[at] end
  try('DEL', unpack(lists))
end
if queued > 0 then tidy() end
