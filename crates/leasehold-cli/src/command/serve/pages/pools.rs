//! The page of pools and their leases.

use leasehold::{PoolMember, PoolStats};
use maud::{Markup, html};

use super::{Content, View, about_actions, about_hidden, cell, number, table, text};
use crate::command::serve::console::ConsoleState;
use crate::output::ago;

const TITLES: [&str; 4] = ["Pool", "Instance", "Silent for", "Lease left"];
/// The number of leases that are shown.
const SHOWN: usize = 1000;

pub(super) fn content(state: &ConsoleState, view: &View) -> Content {
    let pools = state.monitor.latest().map_or(&[][..], |latest| &latest.pools);
    let leases: usize = pools.iter().map(|pool| pool.members.len()).sum();
    let body = html! {
        h1 { "Pools" }
        p.summary {
            strong { (pools.len()) } @if pools.len() == 1 { " pool, " } @else { " pools, " }
            strong { (leases) } " leases. The store does not know the capacity of a pool; only its programs do."
        }
        (about_hidden(state, "pools"))
        (about_actions(view))
        @if leases == 0 { p.empty { "No pool lease is held." } }
        @else { (table("Leases of pools", &TITLES, &rows(pools, view))) }
        @if leases > SHOWN { p.hint { "and " (leases - SHOWN) " more." } }
    };
    Content { title: "Pools".to_owned(), body }
}

fn rows(pools: &[PoolStats], view: &View) -> Markup {
    let leases = pools.iter().flat_map(|pool| pool.members.iter().map(move |one| (pool, one)));
    html! {
        @for (pool, one) in leases.take(SHOWN) {
            tr role="row" data-key={ (pool.name) " " (one.id) } {
                th role="rowheader" scope="row" { (text(&pool.name)) }
                (cell("Instance", &html! {
                    code { (text(&one.id)) }
                    @if view.may_act { " " (release(pool, one)) }
                }))
                (number("Silent for", ago(one.silent_for)))
                (number("Lease left", one.expires_in.map_or_else(|| "expired".to_owned(), ago)))
            }
        }
    }
}

fn release(pool: &PoolStats, member: &PoolMember) -> Markup {
    html! {
        form.inline method="get" action="/act" data-confirm {
            input type="hidden" name="kind" value="pool";
            input type="hidden" name="action" value="release";
            input type="hidden" name="name" value=(pool.name);
            input type="hidden" name="id" value=(member.id);
            button type="submit" { "Release…" }
        }
    }
}
