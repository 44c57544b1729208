//! What the tests of leasehold share.

#![allow(missing_docs)] // read by us alone
