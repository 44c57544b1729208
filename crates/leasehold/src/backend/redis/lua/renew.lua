-- Signs of life. Never moves a waiter, and confirms nobody.
--
-- ARGV    from 6 on two for each id: id, heartbeat
-- Result  four for each id: "held", slot number, fence, valid_for | "claim", slot number, 0, valid_for (granted, and
--         not yet claimed) | "waiting", 0, 0, 0 | "gone", 0, 0, 0
expire()
grant()
local ids = {}
for at = 6, #ARGV, 2 do ids[#ids + 1] = ARGV[at] end
-- `ZADD XX CH` answers 0 for a member that keeps its score, so who is there is asked for.
local renew_by = redis.call('ZMSCORE', MAIN, unpack(ids))
-- By its place, not by its sign of life: another program's expiry may have ended either key.
local places = redis.call('ZMSCORE', WAITING, unpack(ids))
local hold_until = redis.call('ZMSCORE', TTL, unpack(ids))
local infos = redis.call('HMGET', INFO, unpack(ids))
for i, id in ipairs(ids) do
  local heartbeat = tonumber(ARGV[6 + (i - 1) * 2 + 1])
  if holding[id] then
    answer('held', hold_again(id, heartbeat))
  elseif renew_by[i] then
    local info = parse(infos[i])
    if info.fence then
      add(writes.main, stamp_in(heartbeat), id)
      local left = ttl_left(id, info, hold_until[i])
      answer('held', held, info.fence, math.min(heartbeat, left or heartbeat))
    else
      answer('claim', held, 0, micros(renew_by[i]) - NOW)
    end
  elseif places[i] then
    add(writes.alive, stamp_in(heartbeat), id)
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
-- This one comes by again and again, and so sees to all that other programs' expiries would end too soon.
flush(true)
return finish()
