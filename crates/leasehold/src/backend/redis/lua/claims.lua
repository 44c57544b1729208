-- Holders that ask again: what enqueue, confirm and renew share.

-- What is known of an id: its fence if it was confirmed, since when, and what it asked for.
local function parse(info)
  if not info then return {} end
  local fence, since, text = string.match(info, '^(%S+) (%S+) (.*)$')
  return { fence = tonumber(fence), since = tonumber(since), text = text }
end

-- Its heartbeat, anew.
local function renew(id, terms)
  local n = #main
  longest = math.max(longest, terms.heartbeat)
  main[n + 1], main[n + 2] = terms.renew_by, id
end

-- One that this very script has granted a permit asks for it, too.
local function hold_again(id, terms)
  local fence, ttl = holding[id].fence, holding[id].ttl
  renew(id, terms)
  return held, fence, math.min(terms.heartbeat, ttl or terms.heartbeat)
end

-- How long a holder may still hold, by its score in TTL. If another program has let the whole key expire, the
-- score is put back.
local function ttl_left(id, info, hold_until)
  if hold_until then return micros(hold_until) - NOW end
  local ttl = info.fence and tonumber(string.match(info.text, '^%S+ (%S+)'))
  if not ttl then return end
  local left, n = math.max(info.since + ttl - NOW, 0), #ttls
  ttls[n + 1], ttls[n + 2] = stamp(NOW + left), id
  limited = limited + 1
  return left
end

-- Another program may have granted it once, and told it so.
local function forget_notification(id)
  redis.pcall('DEL', ARGV[1] .. ':acquisition_notification:' .. id)
end

-- Claims a permit, or renews the claim. `info` is what is known of it, `hold_until` its score in TTL.
local function confirm(id, info, hold_until, terms)
  local fence, left = info.fence, ttl_left(id, info, hold_until)
  if not fence then
    fence, left = mint(id, terms), terms.ttl
    forget_notification(id)
  end
  renew(id, terms)
  return held, fence, math.min(terms.heartbeat, left or terms.heartbeat)
end
