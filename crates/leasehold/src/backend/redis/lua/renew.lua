-- Signs of life. Never moves a waiter, and confirms nobody.
--
-- ARGV    6 heartbeat  in microseconds
--         7 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "claim", slot number, 0, valid_for (granted, and
--         not yet claimed) | "waiting", 0, 0, 0 | "gone", 0, 0, 0
expire()
grant()
local terms = terms_of(ARGV[6] .. ' -')
-- `ZADD XX CH` answers 0 for a member that keeps its score, so who is there is asked for.
local renew_by = call('ZMSCORE', MAIN, unpack(ARGV, 7))
-- By its place, not by its sign of life: another program's expiry may have ended either key.
local places = call('ZMSCORE', WAITING, unpack(ARGV, 7))
local hold_until = call('ZMSCORE', TTL, unpack(ARGV, 7))
local known = call('HMGET', INFO, unpack(ARGV, 7))
alive = {}
for i = 1, #ARGV - 6 do
  local id = ARGV[6 + i]
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif renew_by[i] then
    local info = parse(known[i])
    if info.fence then
      local left = ttl_left(id, info, hold_until[i])
      renew(id, terms)
      answer('held', held, info.fence, math.min(terms.heartbeat, left or terms.heartbeat))
    else
      answer('claim', held, 0, micros(renew_by[i]) - NOW)
    end
  elseif places[i] then
    local n = #alive
    alive[n + 1], alive[n + 2] = terms.renew_by, id
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
-- This one comes by again and again, and so sees to all that other programs' expiries would end too soon.
return finish('all keys')
