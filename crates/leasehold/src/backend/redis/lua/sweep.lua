-- Removes expired members and grants permits, as every transition does, and nothing else.
--
-- ARGV    nothing
-- Result  nothing
tidy('asks')
