-- Removes ids wherever they are. Twice is harmless.
--
-- ARGV    6 confirmed  "confirmed" if all of them are known to have been confirmed once, else anything
--         7 ids        from here on
-- Result  one for each id: "holder" | "waiter" | "nobody"
local confirmed, waited = ARGV[6] == 'confirmed', queued > 0
expire()
grant()
-- One of these may have been granted a permit just now.
if #main > 0 then
  flush()
  main, ttls, infos = {}, {}, {}
end
-- First the hash: it alone may not have been read before.
call('HDEL', INFO, unpack(ARGV, 7))
for at = 7, #ARGV do
  -- One by one: asking for the scores of all beforehand costs more.
  if call('ZREM', MAIN, ARGV[at]) == 1 then
    outcomes[at - 6] = 'holder'
    held = held - 1
  -- Whoever was confirmed is no waiter again.
  elseif not confirmed and waited and call('ZREM', WAITING, ARGV[at]) == 1 then
    outcomes[at - 6] = 'waiter'
    queued = queued - 1
  else
    outcomes[at - 6] = 'nobody'
  end
end
if limited > 0 then limited = limited - call('ZREM', TTL, unpack(ARGV, 7)) end
if not confirmed then
  if waited then call('ZREM', ALIVE, unpack(ARGV, 7)) end
  -- Only what was never confirmed can have a list: see `confirm`.
  local lists = {}
  for at = 7, #ARGV do lists[at - 6] = ARGV[1] .. ':acquisition_notification:' .. ARGV[at] end
  redis.pcall('DEL', unpack(lists))
end
grant()
return finish()
