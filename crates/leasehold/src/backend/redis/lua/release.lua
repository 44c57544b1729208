-- Removes ids wherever they are. Twice is harmless.
--
-- ARGV    from 6 on the ids
-- Result  one for each id: "holder" | "waiter" | "nobody"
expire()
grant()
-- One of these may have been granted a permit just now.
flush()
local ids = {}
for at = 6, #ARGV do ids[#ids + 1] = ARGV[at] end
local renew_by = held > 0 and redis.call('ZMSCORE', MAIN, unpack(ids)) or {}
local places = queued > 0 and redis.call('ZMSCORE', WAITING, unpack(ids)) or {}
local infos = redis.call('HMGET', INFO, unpack(ids))
local holders, waiters, lists = {}, {}, {}
for i, id in ipairs(ids) do
  if renew_by[i] then
    outcomes[i] = 'holder'
    holders[#holders + 1] = id
    -- Only what was never confirmed can have a list: see `confirm`.
    if not infos[i] or string.sub(infos[i], 1, 1) == '-' then lists[#lists + 1] = NS .. ':acquisition_notification:' .. id end
  elseif places[i] then
    outcomes[i] = 'waiter'
    waiters[#waiters + 1] = id
  else
    outcomes[i] = 'nobody'
    lists[#lists + 1] = NS .. ':acquisition_notification:' .. id
  end
end
if #holders > 0 then forget(holders) end
if #waiters > 0 then leave(waiters) end
if #lists > 0 then redis.pcall('DEL', unpack(lists)) end
grant()
return finish()
