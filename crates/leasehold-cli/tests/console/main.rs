//! `leasehold serve`, through HTTP and in a real browser, on real stores.

mod access;
mod api;
mod bad_input;
mod browser;
mod client;
mod scale;
mod screenshots;
#[path = "../command/support.rs"]
#[allow(dead_code, unreachable_pub)] // the tests of the command use the rest
mod support;
mod webdriver;
