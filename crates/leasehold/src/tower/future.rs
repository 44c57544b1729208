//! The future of a limited response.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::limit::{HeldGuard, Limit};
use super::{LimitedBody, Refuse};
use crate::Error;

pin_project! {
    /// The future of a limited response.
    ///
    /// It acquires, and then runs the inner service: see [`Limited`](super::Limited).
    ///
    /// # Cancel safety
    /// Dropping the future drops the inner service's future. This also cancels the wait, or releases the permit in the
    /// background.
    #[must_use = "a request is not handled until its future is awaited"]
    pub struct ResponseFuture<S, Request, R>
    where
        S: Service<Request>,
    {
        #[pin]
        state: State<S, Request, S::Future>,
        refuse: R,
    }
}

pin_project! {
    #[project = Projected]
    enum State<S, Request, F> {
        Acquiring { limit: Result<Limit, Error>, call: Option<(S, Request)> },
        // The order of the fields matters: the work is dropped before its permit is released.
        Running { #[pin] future: F, held: Option<HeldGuard> },
        Done,
    }
}

impl<S: Service<Request>, Request, R> ResponseFuture<S, Request, R> {
    pub(super) fn new(
        limit: Result<Limit, Error>,
        service: S,
        request: Request,
        refuse: R,
    ) -> Self {
        let call = Some((service, request));
        Self { state: State::Acquiring { limit, call }, refuse }
    }
}

impl<S, Request, R, B> Future for ResponseFuture<S, Request, R>
where
    S: Service<Request, Response = Response<B>>,
    R: Refuse<B, S::Error>,
{
    type Output = Result<Response<LimitedBody<B>>, R::Error>;

    /// # Panics
    /// If it is polled after it is done.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let error = match this.state.as_mut().project() {
                Projected::Acquiring { limit, call } => {
                    let acquired = match limit {
                        Ok(limit) => ready!(limit.poll(cx)),
                        Err(error) => Err(error.clone()),
                    };
                    match (acquired, call.take()) {
                        (Ok(held), Some((mut service, request))) => {
                            let future = service.call(request);
                            this.state.set(State::Running { future, held });
                            continue;
                        }
                        (Ok(_), None) => unreachable!("it is taken out only once"),
                        (Err(error), _) => error,
                    }
                }
                Projected::Running { future, held } => {
                    // Check the loss first, so that the work is never polled after it.
                    if let Some(Poll::Ready(error)) = held.as_mut().map(|held| held.poll_lost(cx)) {
                        error
                    } else {
                        let result = ready!(future.poll(cx));
                        let held = held.take();
                        this.state.set(State::Done);
                        let response = result.map(|response| wrap(response, held));
                        return Poll::Ready(response.map_err(R::failed));
                    }
                }
                Projected::Done => panic!("a response was polled after it was done"),
            };
            this.state.set(State::Done);
            return Poll::Ready(this.refuse.refuse(error).map(|response| wrap(response, None)));
        }
    }
}

fn wrap<B>(response: Response<B>, held: Option<HeldGuard>) -> Response<LimitedBody<B>> {
    response.map(|body| LimitedBody::new(body, held))
}

impl<S: Service<Request>, Request, R> fmt::Debug for ResponseFuture<S, Request, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
