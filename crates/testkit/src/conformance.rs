//! The conformance suite: what semaphores, locks and pools do on every store.
//!
//! A case is an async function of a [`Store`]. A store's test file implements `Store` once, and
//! [`conformance!`](crate::conformance!) makes a test of every case:
//!
//! ```text
//! struct Redis(Server);
//!
//! impl Store for Redis {
//!     async fn client(&self) -> Client {
//!         Client::redis(&self.0.url()).await.unwrap()
//!     }
//! }
//!
//! testkit::conformance!(Redis(Server::start().await));
//! ```
//!
//! The times are long enough for a store across a network. Nothing sleeps to let something happen:
//! a case waits for it, and fails when it has waited too long.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use leasehold::{Acquire, AcquisitionId, Client, Error, Permit, Semaphore};
use tokio::task::JoinHandle;

use crate::counts::assert_all_are_free;
use crate::wait::{deadline, eventually};

pub mod capacity;
pub mod closing;
pub mod guards;
pub mod input;
pub mod leases;
pub mod limits;
pub mod listing;
pub mod lock_ends;
pub mod lock_records;
pub mod lock_waits;
pub mod locks;
pub mod permits;
pub mod pools;
pub mod queue;
pub mod rates;
pub mod statistics;
pub mod weights;
pub mod with;

/// The store on which a case runs.
pub trait Store {
    /// Returns another client that shares its permits and locks with the earlier ones. In memory,
    /// where only one client can do that, it is a clone of it.
    fn client(&self) -> impl Future<Output = Client> + Send;
}

/// Makes a test of every case. The expression makes a new store for each test, and may await.
#[macro_export]
macro_rules! conformance {
    ($store:expr) => {
        $crate::conformance! { @ $store;
            permits:
                there_are_as_many_permits_as_the_capacity_says,
                semaphores_of_one_name_share_their_permits,
                a_permit_may_be_dropped_on_a_thread_without_a_runtime,
                a_permit_may_be_released_by_another_task,
                a_permit_is_released_once,
                an_unknown_id_is_not_an_error,
                a_detached_permit_is_held_until_its_id_is_released,
                a_release_of_another_id_keeps_our_permit,
                a_guard_is_notified_when_its_id_is_released_by_hand,
                a_guard_is_notified_when_another_client_releases_its_id,
                a_stale_release_does_not_end_another_permit,
                fences_grow_from_permit_to_permit,
                fences_grow_under_contention,
                a_semaphore_is_locked_when_an_acquire_would_wait;
            guards:
                a_guard_outlives_its_lease,
                a_ttl_ends_a_guard,
                a_dropped_guard_releases,
                a_guard_is_lost_if_its_id_is_released,
                an_acquire_ends_at_its_limit,
                an_acquire_that_is_not_polled_does_nothing,
                an_acquire_that_is_dropped_leaves_nothing,
                what_is_detached_is_renewed_and_released_by_hand,
                a_release_by_id_notifies_the_guard_of_its_client_at_once,
                with_holds_a_guard_while_the_work_runs,
                work_stops_when_its_guard_is_lost,
                cancelled_or_panicking_work_releases_its_guard,
                a_close_ends_permits,
                a_close_ends_locks,
                a_close_ends_pool_leases;
            queue:
                waiters_are_served_in_order,
                waiters_of_two_clients_are_served_in_order,
                try_acquire_gets_nothing_while_others_wait,
                an_acquire_that_nobody_polls_does_not_wait,
                a_wait_ends_when_its_time_is_up,
                a_semaphore_may_limit_every_wait,
                a_limit_of_one_wait_overrides_that_of_the_semaphore,
                a_limit_of_zero_is_refused,
                a_cancelled_wait_unblocks_the_next_waiter,
                positions_change_as_others_leave,
                a_waiter_is_notified_when_its_id_is_released_by_hand,
                a_waiter_is_cancelled_by_its_id;
            leases:
                a_permit_ends_with_its_ttl_and_is_granted_to_the_next_waiter,
                a_permit_that_was_waited_for_has_its_whole_ttl,
                a_detached_permit_ends_with_its_ttl,
                all_futures_of_a_loss_resolve,
                a_permit_knows_until_when_it_is_valid,
                a_holder_and_a_waiter_outlive_their_heartbeats,
                renewals_do_not_extend_a_ttl;
            with:
                with_returns_the_value_of_the_work,
                the_permit_is_free_when_the_work_is_done,
                work_stops_when_the_ttl_ends,
                work_stops_when_its_permit_is_released_by_hand,
                cancelled_work_ends_before_its_permit,
                panicking_work_releases_its_permit,
                work_does_not_begin_without_a_permit;
            statistics:
                statistics_of_one_name_list_holders_and_count_waiters,
                holders_are_listed_in_the_order_of_their_grants,
                labels_are_shown,
                waiters_are_listed_in_order_on_request,
                statistics_of_given_names_list_no_others,
                statistics_list_all_names_in_use,
                unused_names_are_listed_on_request,
                names_are_sorted_by_use,
                listings_respect_the_limit,
                waiters_are_listed_by_their_places,
                a_client_is_listed_with_its_process;
            capacity:
                the_newest_capacity_wins,
                shrinking_drains,
                growing_lets_waiters_in_before_newcomers,
                clients_need_not_agree_on_a_capacity;
            limits:
                a_limit_that_grows_lets_waiters_in_at_once,
                an_acquire_that_declares_nothing_new_changes_nothing,
                an_undeclared_capacity_changes_nothing,
                a_pin_overrides_declared_capacities,
                a_pin_and_a_pause_outlive_all_holders_and_waiters,
                during_a_pause_nothing_is_granted_and_places_are_kept,
                a_drain_waits_until_nobody_holds,
                a_forgotten_name_starts_anew,
                limits_can_be_read_without_the_holders,
                limits_can_be_set_before_the_first_use,
                the_first_change_declares_the_capacity_of_its_handle,
                limits_that_cannot_be_are_refused;
            weights:
                a_permit_takes_as_many_units_as_it_weighs,
                units_may_be_many,
                no_waiter_overtakes_a_heavy_one,
                a_cancelled_heavy_waiter_lets_light_ones_in,
                a_weight_above_the_capacity_is_refused_at_once,
                a_limit_that_shrinks_below_a_weight_lets_it_wait,
                weights_and_limits_compose,
                slot_numbers_are_the_lowest_that_are_free,
                an_acquire_without_a_slot_number_takes_none;
            rates:
                a_start_needs_room_and_a_token,
                starts_are_as_far_apart_as_the_rate_says,
                no_period_has_more_starts_than_the_rate_says,
                a_change_of_the_rate_adds_no_tokens,
                an_acquire_that_times_out_names_the_rate,
                weights_of_a_rate_alone_are_refused,
                order_holds_at_a_rate,
                a_cancelled_waiter_takes_no_token,
                a_rate_alone_does_not_limit_holders,
                another_rate_counts_at_once,
                an_acquire_keeps_the_rate_that_was_set,
                rates_that_cannot_be_are_refused;
            input:
                names_may_be_written_in_any_script,
                names_are_used_as_they_are,
                names_that_differ_are_two_semaphores,
                names_that_cannot_be_are_refused,
                numbers_that_cannot_be_are_refused,
                labels_that_cannot_be_are_refused;
            closing:
                a_close_notifies_waiters,
                a_close_notifies_waiters_in_any_order,
                a_close_notifies_holders,
                a_closed_client_refuses_new_calls,
                a_closed_client_changes_no_limits,
                closing_twice_is_harmless,
                a_closed_client_only_releases_by_id,
                a_close_frees_permits_for_other_clients,
                a_close_waits_for_what_was_dropped,
                acquires_during_a_close_leave_nothing_held;
            listing:
                locks_that_are_held_are_listed,
                pools_that_have_members_are_listed;
            pools:
                there_are_as_many_leases_as_the_capacity_says,
                pools_of_one_name_share_their_leases,
                an_instance_that_acquires_again_takes_no_second_lease,
                a_missing_lease_is_reported,
                a_lease_ends_with_its_ttl,
                a_renewed_lease_stays_held,
                a_waiting_acquire_gets_the_next_lease,
                a_wait_that_was_too_long_says_how_full_it_was,
                a_stale_release_does_not_end_a_newer_lease,
                a_shared_lease_is_released_with_its_last_guard,
                pools_that_cannot_be_are_refused,
                instance_ids_that_cannot_be_are_refused;
            locks:
                a_lock_has_one_holder,
                equal_keys_are_one_lock,
                keys_that_differ_are_two_locks,
                fences_of_a_key_only_grow,
                holders_are_one_after_the_other,
                a_lock_is_released_once,
                the_next_extension_reports_a_released_id,
                an_extension_replaces_what_was_left,
                a_lock_ends_with_its_ttl,
                an_unwatched_guard_notices_its_end,
                a_renewed_lock_outlives_its_lease,
                a_renewal_does_not_undo_an_extension,
                a_guard_has_the_id_key_and_fence_of_its_lock;
            lock_waits:
                a_release_ends_a_wait,
                a_drop_ends_a_wait,
                a_release_by_id_ends_a_wait,
                the_end_of_a_ttl_ends_a_wait,
                a_wait_goes_on_while_the_holder_extends,
                a_lock_that_stays_locked_is_an_error,
                a_lock_is_retried_as_often_as_the_policy_allows,
                a_crowd_is_served_one_after_the_other,
                a_waiter_that_leaves_takes_no_wake_up_with_it,
                an_acquire_that_is_dropped_leaves_nothing,
                locks_work_without_a_runtime;
            lock_ends:
                a_close_notifies_waiters,
                a_close_ends_acquires_in_every_state,
                a_close_frees_permits_for_other_clients;
            lock_records:
                an_acquire_with_the_same_id_returns_the_same_lock,
                is_locked_reports_the_lock,
                a_lookup_shows_secrets_only_on_request,
                a_lookup_names_the_holder,
                labels_of_locks_that_cannot_be_are_refused,
                a_store_reports_its_capabilities,
                an_observer_receives_every_call_by_key_and_by_id,
                an_observer_receives_secrets_only_on_request,
                a_panic_of_an_observer_has_no_effect,
                keys_that_cannot_be_are_refused,
                times_that_cannot_be_are_refused,
                lock_ids_that_cannot_be_are_refused,
                retries_that_cannot_be_are_refused;
        }
    };
    (@ $store:expr; $($module:ident: $($case:ident),+;)+) => {
        mod conformance {
            $(mod $module {
                #[allow(unused_imports)] // imports for the expression
                use super::super::*;

                $(#[tokio::test]
                async fn $case() {
                    $crate::conformance::$module::$case(&$store).await;
                })+
            })+
        }
    };
}

/// Short for a person, long for a store across a network.
const SHORT: Duration = Duration::from_millis(400);

/// Returns a name that no other case uses, nor another run on the same store.
fn unique(about: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    // Padded, so that names sort in the order in which they were made.
    format!("{about} {process}.{next:06}")
}

/// Returns a semaphore of a new client, with a unique name.
async fn semaphore(store: &impl Store, about: &str, capacity: u32) -> Semaphore {
    declare(&store.client().await, &unique(about), capacity)
}

fn declare(client: &Client, name: &str, capacity: u32) -> Semaphore {
    client.semaphore(name, capacity).build().unwrap()
}

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}

async fn try_acquire(semaphore: &Semaphore) -> Option<Permit> {
    deadline(semaphore.try_acquire()).await.unwrap()
}

async fn release(permit: Permit) -> bool {
    deadline(permit.release()).await.unwrap()
}

async fn release_by_id(semaphore: &Semaphore, id: AcquisitionId) -> bool {
    deadline(semaphore.release(&id)).await.unwrap()
}

/// Returns the number of holders and the number of waiters.
async fn held_and_waiting(semaphore: &Semaphore) -> (u32, usize) {
    deadline(crate::counts::held_and_waiting(semaphore)).await
}

/// Fails unless every permit becomes free and can be acquired.
async fn all_are_free(semaphore: &Semaphore) {
    eventually(async || held_and_waiting(semaphore).await == (0, 0)).await;
    deadline(assert_all_are_free(semaphore)).await;
}

/// An acquire in the queue, waiting in its own task.
struct Waiter {
    id: AcquisitionId,
    task: JoinHandle<Result<Permit, Error>>,
}

impl Waiter {
    /// Starts an acquire, and returns when it is in the queue.
    async fn join(semaphore: &Semaphore) -> Self {
        Self::join_with(semaphore, semaphore.acquire()).await
    }

    async fn join_with(semaphore: &Semaphore, acquire: Acquire) -> Self {
        let id = acquire.id();
        let task = tokio::spawn(acquire);
        eventually(async || semaphore.position(&id).await.unwrap().is_some()).await;
        Self { id, task }
    }

    async fn result(self) -> Result<Permit, Error> {
        deadline(self.task).await.unwrap()
    }

    async fn permit(self) -> Permit {
        self.result().await.unwrap()
    }

    async fn error(self) -> Error {
        self.result().await.unwrap_err()
    }

    /// Drops the acquire.
    async fn leave(self) {
        self.task.abort();
        assert!(deadline(self.task).await.unwrap_err().is_cancelled(), "it was granted a permit");
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_case_is_in_the_list() {
        let list = include_str!("conformance.rs");
        let modules = [
            include_str!("conformance/capacity.rs"),
            include_str!("conformance/closing.rs"),
            include_str!("conformance/guards.rs"),
            include_str!("conformance/input.rs"),
            include_str!("conformance/leases.rs"),
            include_str!("conformance/listing.rs"),
            include_str!("conformance/lock_ends.rs"),
            include_str!("conformance/lock_records.rs"),
            include_str!("conformance/lock_waits.rs"),
            include_str!("conformance/locks.rs"),
            include_str!("conformance/permits.rs"),
            include_str!("conformance/pools.rs"),
            include_str!("conformance/queue.rs"),
            include_str!("conformance/rates.rs"),
            include_str!("conformance/statistics.rs"),
            include_str!("conformance/limits.rs"),
            include_str!("conformance/weights.rs"),
            include_str!("conformance/with.rs"),
        ];
        for line in modules.iter().flat_map(|module| module.lines()) {
            let Some(case) = line.strip_prefix("pub async fn ") else { continue };
            let (case, _) = case.split_once('(').unwrap();
            let listed = |end| list.contains(&format!(" {case}{end}\n"));
            assert!(listed(',') || listed(';'), "{case} is never run");
        }
    }
}
