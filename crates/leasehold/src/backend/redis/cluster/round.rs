//! One round of queries for the map: which nodes are asked, how long the client waits for them, and which map it uses.
//!
//! The client asks a few nodes at once: first those that it is connected to, then the others. Nodes that hang or cannot
//! be reached do not delay it: a moment later it asks the next few as well. The first map from a node whose cluster
//! state is ok ends the round.
//!
//! During a failover there may be no such node. The best of the other maps is used then: the one with most slots, and
//! of these the one with the newest epoch. A node that has left the cluster and still runs has an empty map.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Cluster;
use super::map::{Map, MapSource, ask_one};
use crate::Error;
use crate::backend::redis::connection::Target;
use crate::url::ServerSettings;

/// How many nodes are asked at once.
const ASKED_AT_ONCE: usize = 4;

/// How long the client waits for the answers of these nodes before it asks the next ones.
const NEXT_AFTER: Duration = Duration::from_millis(100);

/// How often nodes that the client is not connected to are asked, if it is connected to others.
const OTHERS_EVERY: Duration = Duration::from_millis(500);

impl Cluster {
    /// Asks for the map. `others_asked` is when nodes without a connection were last asked.
    pub(super) async fn query(&self, others_asked: &mut Option<Instant>) -> Result<Map, Error> {
        let began = Instant::now();
        let until = began + self.settings.connect_timeout;
        let mut sources = self.sources(others_asked).into_iter();
        let (mut asked, mut first_after) = (JoinSet::new(), None);
        let (mut doubtful, mut problem): (Option<Map>, _) = (None, None);
        loop {
            for one in sources.by_ref().take(ASKED_AT_ONCE) {
                asked.spawn(ask_one(self.settings.clone(), one));
            }
            let is_last = sources.len() == 0;
            let started = Instant::now();
            loop {
                // The time until the first map arrived shows how fast nodes answer. If no map has arrived, the last
                // nodes get all the time that is left.
                let limit = match first_after {
                    _ if !is_last => NEXT_AFTER,
                    Some(after) => NEXT_AFTER.max(4 * after),
                    None => self.settings.connect_timeout,
                };
                let answered = asked.join_next();
                let answered = tokio::time::timeout_at((started + limit).min(until), answered);
                let Ok(Some(answer)) = answered.await else { break };
                match answer.unwrap_or_else(|error| Err(Error::internal(error.to_string()))) {
                    Ok(map) if map.is_sure => return Ok(map),
                    Ok(map) => {
                        first_after.get_or_insert_with(|| began.elapsed());
                        let is_better = |best: &Map| map.rank() > best.rank();
                        if doubtful.as_ref().is_none_or(is_better) {
                            doubtful = Some(map);
                        }
                    }
                    // A permanent error explains the failure better than a temporary one.
                    Err(error) if problem.is_none() || !error.is_transient() => {
                        problem = Some(error);
                    }
                    Err(_) => {}
                }
            }
            if is_last || Instant::now() >= until {
                break;
            }
        }
        doubtful.ok_or_else(|| problem.unwrap_or_else(|| self.silence()))
    }

    /// Returns the nodes to ask, in this order. No node is asked twice.
    fn sources(&self, others_asked: &mut Option<Instant>) -> Vec<MapSource> {
        let mut connections = self.primaries();
        connections.retain(|connection| connection.is_up());
        let recently = others_asked.is_some_and(|at| at.elapsed() < OTHERS_EVERY);
        let mut others = if recently && !connections.is_empty() {
            Vec::new()
        } else {
            *others_asked = Some(Instant::now());
            self.others()
        };
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        rotate(&mut connections, turn);
        rotate(&mut others, turn);
        let connected = connections.into_iter().filter_map(|connection| {
            let Target::Node(info) = &connection.target else { return None };
            Some(MapSource { info: info.clone(), connection: Some(connection) })
        });
        let others = others.into_iter().map(|info| MapSource { info, connection: None });
        let mut addresses = HashSet::new();
        let is_new = |source: &MapSource| addresses.insert(source.info.host_and_port());
        connected.chain(others).filter(is_new).collect()
    }

    /// Returns the nodes in the URL, and those that earlier maps have named.
    fn others(&self) -> Vec<ServerSettings> {
        let mut others = self.seeds.clone();
        if let Some(seed) = self.seeds.first() {
            let known = &self.state().known;
            others.extend(known.iter().map(|(host, port)| seed.at(host, *port)));
        }
        others
    }
}

/// Rotates the nodes, so that others are asked first each time.
fn rotate<T>(all: &mut [T], turn: usize) {
    if !all.is_empty() {
        all.rotate_left(turn % all.len());
    }
}
