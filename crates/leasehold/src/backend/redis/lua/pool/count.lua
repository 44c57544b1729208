-- Returns the number of leases that are held.
--
-- Result  current_count, expired_count
return { call('ZCARD', MEMBERS), expired }
