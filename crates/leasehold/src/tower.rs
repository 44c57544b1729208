//! A [`tower`](https://docs.rs/tower) layer that limits the requests of an HTTP service, such as an axum router.
//!
//! A function of yours looks at each request and returns its [`Limit`]: an acquire of a semaphore, a lock or a rate,
//! whose name may depend on the request. The request waits for it, runs under it, and releases it when the body of the
//! response has ended.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! use axum::body::Body;
//! use axum::http::{Request, Response, StatusCode, header};
//! use axum::{Router, routing::get};
//! use leasehold::tower::LimitLayer;
//! use leasehold::Client;
//! use std::time::Duration;
//!
//! let client = Client::memory();
//! // At most five requests of each tenant at once, and no request waits for more than two seconds.
//! let limit = LimitLayer::new(move |request: &Request<Body>| {
//!     let tenant = request.headers().get("x-tenant").and_then(|value| value.to_str().ok());
//!     let name = format!("tenant:{}", tenant.unwrap_or("unknown"));
//!     Ok(client.semaphore(&name, 5).build()?.acquire().within(Duration::from_secs(2)))
//! })
//! .refuse_with(|_error| {
//!     let mut response = Response::new(Body::from("busy: try again in a second\n"));
//!     *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
//!     response.headers_mut().insert(header::RETRY_AFTER, 1.into());
//!     response
//! });
//! let app: Router = Router::new().route("/", get(async || "hello")).layer(limit);
//! # drop(app);
//! # }
//! ```
//!
//! # How long a permit is held
//!
//! A permit is held from its grant until the body of the response has been produced, or dropped because the connection
//! was closed. A response whose body is a stream holds its permit as long as the stream lasts. After an upgrade, such
//! as to a WebSocket, the body has ended, and the permit is released.
//!
//! # If a permit is lost
//!
//! - *Before the response:* the future of the inner service is dropped without being polled again, and the request is
//!   refused with [`Error::Lost`].
//! - *During its body:* the body ends with that error. An HTTP server then closes the connection, so that the client
//!   notices that the response is incomplete. The body notices the loss when the server polls it: if the client does
//!   not read, that may be late.
//!
//! # If a permit is not granted
//!
//! A request is refused if its acquire fails, or if your function does. By default the service returns the [`Error`] as
//! its own error, boxed. With [`refuse_with`](LimitLayer::refuse_with) it returns a response that you make; axum needs
//! that, because its services must not fail. There the variants matter: [`Error::TimedOut`] means that the limit was
//! reached, [`Error::Unavailable`] that the store cannot be reached.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Response;
use tower_layer::Layer;
use tower_service::Service;

use crate::Error;

mod body;
mod future;
mod limit;

pub use body::LimitedBody;
pub use future::ResponseFuture;
pub use limit::Limit;

type BoxError = Box<dyn StdError + Send + Sync>;

/// A layer that limits the requests of a service: see the [module](self).
///
/// `F` is the function that returns the limit of a request. `R` determines what happens to a request that is refused.
pub struct LimitLayer<F, R = Fail> {
    limit: Arc<F>,
    refuse: R,
}

impl<F> LimitLayer<F> {
    /// Creates a layer. `limit` returns the limit of a request: something that can be converted into a [`Limit`], or an
    /// error with which the request is refused.
    ///
    /// ```
    /// use http::Request;
    /// use leasehold::Client;
    /// use leasehold::tower::{Limit, LimitLayer};
    /// use std::time::Duration;
    ///
    /// let client = Client::memory();
    /// let layer = LimitLayer::new(move |request: &Request<String>| {
    ///     let path = request.uri().path();
    ///     Ok(match path {
    ///         "/health" => Limit::none(),
    ///         // One at a time, in no particular order.
    ///         "/report" => client.lock("report").build()?.into(),
    ///         // 100 starts per minute; a request without a token is refused at once.
    ///         "/mail" => client.rate("mail", 100, Duration::from_secs(60)).build()?.try_acquire().into(),
    ///         // Ten at a time of each path.
    ///         _ => client.semaphore(path, 10).build()?.acquire().into(),
    ///     })
    /// });
    /// # let _: &dyn std::fmt::Debug = &layer;
    /// ```
    pub fn new<Request, L: Into<Limit>>(limit: F) -> Self
    where
        F: Fn(&Request) -> Result<L, Error>,
    {
        Self { limit: Arc::new(limit), refuse: Fail }
    }

    /// Answers a request that is refused with the response that `respond` makes of the error.
    ///
    /// The service then fails only if the inner service does.
    pub fn refuse_with<R, B>(self, respond: R) -> LimitLayer<F, Respond<R>>
    where
        R: Fn(&Error) -> Response<B>,
    {
        LimitLayer { limit: self.limit, refuse: Respond(Arc::new(respond)) }
    }
}

impl<F, R: Clone> Clone for LimitLayer<F, R> {
    fn clone(&self) -> Self {
        Self { limit: self.limit.clone(), refuse: self.refuse.clone() }
    }
}

impl<F, R> fmt::Debug for LimitLayer<F, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer").finish_non_exhaustive()
    }
}

impl<S, F, R: Clone> Layer<S> for LimitLayer<F, R> {
    type Service = Limited<S, F, R>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited { inner, layer: self.clone() }
    }
}

/// A service whose requests are limited: see [`LimitLayer`].
///
/// It is ready when the inner service is. Requests wait for their permits in the futures of their responses, so one
/// that waits does not delay the others.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use http::{Request, Response};
/// use leasehold::tower::LimitLayer;
/// use leasehold::{Client, Error};
/// use tower_layer::Layer;
/// use tower_service::Service;
///
/// #[derive(Clone)]
/// struct Hello;
///
/// impl Service<Request<String>> for Hello {
///     type Response = Response<String>;
///     type Error = Error;
///     type Future = std::future::Ready<Result<Response<String>, Error>>;
///
///     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Error>> {
///         std::task::Poll::Ready(Ok(()))
///     }
///
///     fn call(&mut self, request: Request<String>) -> Self::Future {
///         std::future::ready(Ok(Response::new(format!("hello {}", request.body()))))
///     }
/// }
///
/// let api = Client::memory().semaphore("api", 1).build()?;
/// let limited = api.clone();
/// let mut service = LimitLayer::new(move |_: &Request<String>| Ok(limited.try_acquire())).layer(Hello);
///
/// let response = service.call(Request::new("you".to_owned())).await?;
/// assert_eq!(api.stats().await?.held, 1); // as long as the body is there
///
/// let refused = service.call(Request::new("me".to_owned())).await.unwrap_err();
/// assert!(matches!(refused.downcast_ref(), Some(Error::TimedOut { .. })));
///
/// drop(response);
/// assert_eq!(api.stats().await?.held, 0);
/// # Ok(())
/// # }
/// ```
pub struct Limited<S, F, R = Fail> {
    inner: S,
    layer: LimitLayer<F, R>,
}

impl<S: Clone, F, R: Clone> Clone for Limited<S, F, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone() }
    }
}

impl<S: fmt::Debug, F, R> fmt::Debug for Limited<S, F, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limited").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<Request, S, F, L, R, B> Service<Request> for Limited<S, F, R>
where
    S: Service<Request, Response = Response<B>> + Clone,
    F: Fn(&Request) -> Result<L, Error>,
    L: Into<Limit>,
    R: Refuse<B, S::Error> + Clone,
{
    type Response = Response<LimitedBody<B>>;
    type Error = R::Error;
    type Future = ResponseFuture<S, Request, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(R::failed)
    }

    /// Acquires for this request, and then calls the inner service.
    ///
    /// # Cancel safety
    /// Dropping the future drops the inner service's future. This also cancels the wait, or releases the permit in the
    /// background.
    fn call(&mut self, request: Request) -> Self::Future {
        let limit = (self.layer.limit)(&request).map(L::into);
        // The future takes the service that is ready. The clone has to become ready first.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        ResponseFuture::new(limit, ready, request, self.layer.refuse.clone())
    }
}

/// Returns the error of a request that is refused as the error of the service.
///
/// The default of [`LimitLayer`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Fail;

/// Answers a request that is refused: see [`LimitLayer::refuse_with`].
pub struct Respond<R>(Arc<R>);

impl<R> Clone for Respond<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R> fmt::Debug for Respond<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Respond").finish_non_exhaustive()
    }
}

/// What happens to a request that is refused: [`Fail`] or [`Respond`].
pub trait Refuse<B, E>: sealed::Sealed {
    /// The error of the service.
    type Error;

    /// Converts the error of the inner service.
    fn failed(error: E) -> Self::Error;

    /// Returns the result of a request that is refused.
    ///
    /// # Errors
    /// [`Fail`] returns `error`. [`Respond`] never fails.
    fn refuse(&self, error: Error) -> Result<Response<B>, Self::Error>;
}

impl<B, E: Into<BoxError>> Refuse<B, E> for Fail {
    type Error = BoxError;

    fn failed(error: E) -> BoxError {
        error.into()
    }

    fn refuse(&self, error: Error) -> Result<Response<B>, BoxError> {
        Err(error.into())
    }
}

impl<B, E, R: Fn(&Error) -> Response<B>> Refuse<B, E> for Respond<R> {
    type Error = E;

    fn failed(error: E) -> E {
        error
    }

    fn refuse(&self, error: Error) -> Result<Response<B>, E> {
        Ok((self.0)(&error))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Fail {}
    impl<R> Sealed for super::Respond<R> {}
}
